"""A provider's limits over all worker processes: requests at the same time and in a minute, shared fairly by users. At
intervals, each process reports which places it holds and for which users it waits, and gets the requests that it may
begin. The numbers are absolute, so the next report corrects a lost answer.
"""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from django.db import transaction

from config.kernel import clock
from runs.catalogue.definitions import Server
from runs.models import ProviderUse

MODEL_PLACES_LEASE_SECONDS = 20  # after this time, a lost worker's places at providers with limits are free
MODEL_PLACES_POLL_SECONDS = 0.1  # how often a worker with waiting runs asks for places at providers with limits

WINDOW_SECONDS = 60  # requests are counted by the second in which they begin
# A process's report of its waiting requests is valid for this many polls. Until then, a place that is kept for a lost
# process stays unused.
VALID_POLLS = 10


def share_out(
    document: dict[str, Any], server: Server, process: str, working: int, waiting: Mapping[str, int], now: float
) -> tuple[dict[str, Any], dict[str, int]]:
    """The next document, and the number of requests that may begin, by user. A process reports how many requests it
    makes now (``working``), and how many wait, by user id. Free places go to one user after another. If the next user
    waits in another process, the place is left for that process, which asks soon.
    """
    processes = {name: report for name, report in document.get("processes", {}).items() if report["until"] > now}
    processes.pop(process, None)
    wanted, granted = Counter(waiting), Counter[str]()
    for report in processes.values():
        if report["waits_until"] > now:
            wanted.update(report["waiting"])
    line = dict.fromkeys([*(user for user in document.get("line", []) if user in wanted), *wanted])
    buckets = [bucket for bucket in document.get("buckets", []) if bucket[0] + 1 + WINDOW_SECONDS > now]

    free = float("inf")
    if server.max_concurrent:
        free = server.max_concurrent - working - sum(report["working"] for report in processes.values())
    if server.requests_per_minute:
        free = min(free, server.requests_per_minute - sum(count for _, count in buckets))
    turns = deque(line)
    while free > 0 and turns:
        user = turns.popleft()
        free -= 1
        wanted[user] -= 1
        if granted[user] < waiting.get(user, 0):
            granted[user] += 1
            line[user] = line.pop(user)  # the user goes to the end of the line
        if wanted[user]:
            turns.append(user)
    if granted:
        second = now // 1
        before = buckets.pop()[1] if buckets and buckets[-1][0] == second else 0
        buckets.append([second, before + granted.total()])
    processes[process] = {
        "working": working + granted.total(),
        "until": now + MODEL_PLACES_LEASE_SECONDS,
        "waiting": Counter(waiting) - granted,
        "waits_until": now + VALID_POLLS * MODEL_PLACES_POLL_SECONDS,
    }
    return {"processes": processes, "line": list(line), "buckets": buckets}, dict(granted)


@transaction.atomic
def take(server: Server, process: str, working: int, waiting: Mapping[str, int]) -> dict[str, int]:
    """The number of requests that may begin, by user."""
    row, _ = ProviderUse.objects.select_for_update(no_key=True).get_or_create(provider=server.name)
    document, granted = share_out(row.document, server, process, working, waiting, clock.now().timestamp())
    ProviderUse.objects.filter(pk=row.pk).update(document=document)
    return granted
