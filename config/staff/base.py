"""Base classes of the admin: lists and pages that stay fast at a million rows, and rows that nobody can edit."""

from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any, ClassVar

from django.apps import apps
from django.contrib import admin
from django.contrib.admin import ShowFacets
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import unquote
from django.contrib.auth import get_user_model
from django.db.models import DateTimeField, Model, Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html
from unfold import paginator
from unfold.admin import ModelAdmin
from unfold.decorators import display

from config.kernel import clock, money
from config.kernel.choices import StatusChoices
from config.kernel.ids import IdField

PAGE_SIZE = 50
# A later page would read and discard all rows before it.
PAGES_MAX = 200
SEARCH_WORDS_MAX = 5
NOTHING = Q(pk__in=())


class InfinitePaginator(paginator.InfinitePaginator):
    """Next and previous without a count of rows. Unfold's templates recognise the class by its name."""

    num_pages = PAGES_MAX


class ReadOnly:
    """Rows that only the service writes; not even a superuser can edit them."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission


class StaffAdmin(ModelAdmin):
    """A list, newest first, by the index of the ids. Searches only use indexed columns. Only the fields of
    ``list_filter`` and ``url_lookups`` can be filters: others would let staff guess hidden values letter by letter.
    """

    ordering: ClassVar[Any] = ("-pk",)
    paginator: Any = InfinitePaginator
    list_per_page = PAGE_SIZE
    show_full_result_count = False
    show_facets = ShowFacets.NEVER
    sortable_by: Any = ()
    # If this is not empty, Django shows the search field.
    search_fields: ClassVar[Any] = ("pk",)
    list_fullwidth = True
    list_disable_select_all = True
    empty_text: ClassVar[str] = ""
    empty_value_display = "–"
    url_lookups: ClassVar[tuple[str, ...]] = ("user__id__exact",)
    user_field: ClassVar[str] = "user"
    # Columns with secrets or the content of users. They are not even read, so a save leaves them as they are.
    unread: ClassVar[tuple[str, ...]] = ()
    # By an id's prefix, the field in which a search looks for the id; besides the primary key.
    id_fields: ClassVar[dict[str, str]] = {}

    def find(self, word: str) -> Q:
        """The condition of one word of a search: an id, or a user. ``NOTHING`` for a word that cannot match."""
        prefix, mark, _ = word.partition("_")
        if mark and prefix in self.id_fields:
            return Q(**{self.id_fields[prefix]: word})
        own = getattr(self.opts.pk, "prefix", None)
        if not hasattr(self.model, self.user_field) or (mark and prefix == own):
            return Q(pk=word) if own else NOTHING
        return Q(**{f"{self.user_field}__in": users_named(word)})

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows = super().get_queryset(request).defer(*self.unread)
        related: Any = self.list_select_related
        return rows.select_related(*related) if related else rows

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        # A list without a search field ignores words in its address.
        for word in search_term.split()[:SEARCH_WORDS_MAX] if self.search_fields else ():
            queryset = queryset.filter(self.find(word))
        return queryset, False

    def get_list_display(self, request: HttpRequest) -> list[Any]:
        """Ids are short, and times relative."""
        fields = [field for field in self.opts.concrete_fields if isinstance(field, (IdField, DateTimeField))]
        columns = {field.name: key_column if isinstance(field, IdField) else time_column(field) for field in fields}
        return [columns.get(name, name) for name in super().get_list_display(request)]

    def get_list_display_links(self, request: HttpRequest, list_display: Any) -> Any:
        return None if key_column in list_display else super().get_list_display_links(request, list_display)

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        filtered = {getattr(entry, "parameter_name", entry) for entry in self.list_filter}
        field, _, how = lookup.partition("__")
        return lookup in self.url_lookups or (field in filtered and how in ("", "exact", "isnull"))

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        # PostgreSQL refuses NUL in a query, and no stored value contains it.
        nul = any("\0" in value for values in request.GET.lists() for value in values[1])
        if nul or not all(map(self.is_key, request.POST.getlist(ACTION_CHECKBOX_NAME))):
            return HttpResponseRedirect(request.path)
        return super().changelist_view(request, extra_context)

    def is_key(self, text: str) -> bool:
        """Whether a row could have this primary key: an id, or a number."""
        return "\0" not in text if hasattr(self.opts.pk, "prefix") else is_number(text)

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Model | None:
        return super().get_object(request, object_id, from_field) if self.is_key(object_id) else None

    def row(self, request: HttpRequest, object_id: str) -> Any:
        row = self.get_object(request, unquote(object_id))
        if row is None:
            raise Http404
        return row

    def page(self, request: HttpRequest, template: str, title: str, row: Any = None, **context: Any) -> HttpResponse:
        """A page that belongs to the list or to a row, to which ``back`` leads."""
        back = self.home(row) if row else self.url("changelist")
        common = self.admin_site.each_context(request) | {"opts": self.opts, "title": title, "back": back}
        subject = {"original": row, "subtitle": row} if row else {}
        return TemplateResponse(request, template, common | subject | context)

    def home(self, row: Any) -> str:
        """The address to which an action on the row leads back."""
        return self.url("change", row.pk)

    def url(self, name: str, *args: Any) -> str:
        return reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_{name}", args=args)


def amount(micro: int) -> str:
    """Credits to read, with the exact amount on hover."""
    text, exact = money.rounded(micro), money.to_text(micro)
    return text if text == exact else format_html('<span title="{} credits">{}</span>', exact, text)


def span(lasted: timedelta) -> str:
    """A duration as text: ``230 ms``, ``4.2 s``, ``3 min 5 s``, ``2 h 4 min``, ``3 d 2 h``."""
    seconds = max(0.0, lasted.total_seconds())
    if seconds < 1:
        return f"{round(seconds * 1000)} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def model_of(key: str) -> type[Model] | None:
    """The model whose ids have the prefix of ``key``, if the admin shows it."""
    prefix = key.partition("_")[0]
    shown = filter(admin.site.is_registered, apps.get_models())
    return next((model for model in shown if getattr(model._meta.pk, "prefix", None) == prefix), None)


def page_of(model: type[Model], key: str) -> str:
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_change", args=[key])


def id_link(key: str) -> str:
    """A link to the row, if the admin shows it. Its text leaves out the middle of the id, which would fill the list."""
    if (model := model_of(key)) is None:
        return key
    prefix, mark, rest = key.rpartition("_")
    return format_html('<a href="{}" title="{}">{}</a>', page_of(model, key), key, f"{prefix}{mark}…{rest[-6:]}")


@admin.display(description="id")
def key_column(row: Model) -> str:
    """The link, and a button that copies the id."""
    button = (
        '<button type="button" class="staff-copy material-symbols-outlined" data-copy="{}" aria-label="Copy {}">'
        "content_copy</button>"
    )
    return id_link(row.pk) + format_html(button, row.pk, row.pk)


def time_column(field: DateTimeField) -> Callable[[Any], str]:
    """A column of lists: how long ago the moment was, with the moment on hover."""

    @admin.display(description=field.verbose_name)
    def column(row: Any) -> Any:
        moment = getattr(row, field.name)
        return moment and format_html('<time title="{} UTC">{}</time>', f"{moment:%Y-%m-%d %H:%M:%S}", ago(moment))

    return column


def ago(moment: datetime) -> str:
    """``5 s ago``, ``in 3 min``, ``2 h ago``; the date if it is over two days away."""
    away = clock.now() - moment
    if abs(away) > timedelta(days=2):
        return f"{moment:%Y-%m-%d}"
    text = span(timedelta(seconds=abs(int(away.total_seconds())))).replace(".0", "")
    return f"in {text}" if away < timedelta(0) else f"{text} ago"


def user_column(name: str = "user", nobody: str = "–") -> Callable[[Any], str]:
    """A column of lists: the user that the dotted ``name`` leads to, as a link to the user's page."""
    find = attrgetter(name)
    column = admin.display(description=name.partition(".")[0])
    return column(lambda row: nobody if find(row) is None else user_link(find(row)))


@admin.display(description="Name")
def user_link(user: Any) -> str:
    return format_html('<a href="{}" class="staff-user">{}</a>', reverse("person", args=[user.pk]), user.get_username())


def link_column(name: str, description: str) -> Callable[[Any], str]:
    """A column of lists: the id in the field ``name`` as a link to its row."""
    return admin.display(description=description)(lambda row: id_link(getattr(row, name) or "") or "–")


def list_column(description: str, text: str, address: str) -> Callable[[Any], str]:
    """A link to a list of rows that belong to the row. ``address``: ``app_model``, and a filter by the row's key."""
    model, _, query = address.partition("?")
    column = admin.display(description=description)
    return column(
        lambda row: format_html('<a href="{}?{}={}">{}</a>', reverse(f"admin:{model}_changelist"), query, row.pk, text)
    )


def choice_filter(field: str, label: str, values: Collection[str]) -> type[admin.SimpleListFilter]:
    """A filter with fixed choices; Django's own would read the whole table to find them."""

    class Filter(admin.SimpleListFilter):
        title, parameter_name = label, field

        def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
            return [(value, value) for value in values]

        def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
            return queryset.filter(**{field: self.value()}) if self.value() in values else queryset

    return Filter


def column(description: str, show: Callable[[Any], Any], **options: Any) -> Any:
    """An attribute of an admin: what its lists and pages show of a row. The options are Unfold's."""
    return display(description=description, **options)(lambda model_admin, row: show(row))


def credits_column(name: str, label: str) -> Any:
    """A column of credits; the field ``name`` holds micro-credits."""
    return column(label, lambda row: amount(getattr(row, name)))


def status_column(statuses: type[StatusChoices]) -> Any:
    """A column of a list: the row's status, in the colour of its tone."""
    return column("status", lambda row: str(row.status), label=statuses.tones())


def is_number(text: str) -> bool:
    """Whether ``text`` is a number that can be a primary key in each database."""
    return text.isascii() and text.isdigit() and len(text) < 10


def users_named(word: str) -> list[int]:
    """The ids of users with this name, e-mail address or id."""
    users = get_user_model()._default_manager
    found = [*users.filter(username=word)[:1]]
    if "@" in word:
        found += users.filter(email__iexact=word)[:100]
    if is_number(word):
        found += users.filter(pk=int(word))
    return sorted({user.pk for user in found})
