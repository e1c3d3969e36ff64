"""A crawler that signs in to the admin and follows every kind of link."""

import html
import re
from collections import Counter, deque
from collections.abc import Iterator
from urllib.parse import urljoin, urlsplit

import requests

# How many pages of each kind to visit. Pages of rows have content; other pages differ only in their ids.
ROWS, OTHERS = 3, 1
ROW = r"/(change|content)/$"
# The logout link, and repeated pages: those with a return link or with two filters.
SKIPPED = r"/logout/|_changelist_filters|&"
# Lists with a filter or in another order show what the whole list shows.
PARTS_OF_LISTS = r"\?"


def sign_in(url: str, name: str, password: str) -> requests.Session:
    session = requests.Session()
    session.trust_env = False
    session.get(f"{url}/admin/login/", timeout=30)
    form = {"username": name, "password": password, "csrfmiddlewaretoken": session.cookies["csrftoken"]}
    answer = session.post(f"{url}/admin/login/", form, headers={"Referer": url}, timeout=30, allow_redirects=False)
    assert answer.status_code == 302, answer.text
    return session


def pages(session: requests.Session, url: str, all_kinds: bool = True) -> Iterator[tuple[str, requests.Response]]:
    """(path, response) of the first page and of the pages that its links lead to: of each kind some, or without the
    parts of lists and one page of each kind.
    """
    rows, skipped = (ROWS, SKIPPED) if all_kinds else (OTHERS, f"{SKIPPED}|{PARTS_OF_LISTS}")
    waiting, seen, kinds = deque(["/admin/"]), {"/admin/"}, Counter[str]()
    while waiting:
        path = waiting.popleft()
        answer = session.get(url + path, timeout=30)
        yield path, answer
        for link in re.findall(r'href="([^"#]+)"', answer.text):
            found = urljoin(path, html.unescape(link))
            kind = kind_of(found)
            if not found.startswith("/admin/") or re.search(skipped, found) or found in seen:
                continue
            if kinds[kind] < (rows if re.search(ROW, kind) else OTHERS):
                kinds[kind] += 1
                seen.add(found)
                waiting.append(found)


def kind_of(path: str) -> str:
    """The path without ids, and the names of its query parameters."""
    parts = urlsplit(path)
    names = sorted(pair.partition("=")[0] for pair in parts.query.split("&"))
    return "/".join("*" if re.search(r"\d", part) else part for part in parts.path.split("/")) + "?".join(names)
