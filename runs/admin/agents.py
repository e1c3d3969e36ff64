"""The catalogue's agents: a save makes a version, and the page of the versions compares and chooses them."""

from datetime import timedelta
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any, ClassVar

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.db.models import Avg, Count, Q
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.html import format_html
from django.utils.http import urlencode
from unfold.decorators import action

from config.kernel import clock, money
from config.kernel.ids import first_id
from config.kernel.jsontext import to_text
from config.staff.base import amount, is_number, span
from config.staff.forms import CreditsField, LinesField, ObjectField, StaffForm
from credits import sums
from runs.admin.tools import CatalogueAdmin
from runs.catalogue import agents
from runs.catalogue.definitions import PARAMETERS
from runs.models import Agent, AgentModel, AgentVersion, OnCreditsExhausted, Run, RunStatus, Tool

VERSIONS_MAX = 100
# The latest runs of these days that the numbers of the versions are of.
RUN_DAYS, RUNS_MAX = 30, 2000
# The time of a comparison can grow with the third power of the number of lines.
COMPARED_LINES_MAX = 2000


class AgentForm(StaffForm, forms.ModelForm):
    """The agent and the content of its current version."""

    instructions = LinesField(
        required=False,
        widget=forms.Textarea(attrs={"rows": 16}),
        help_text="The system prompt. Those of a run are added after them. A change of this or of what follows makes "
        "a new version; runs that have started keep theirs.",
    )
    model = forms.TypedChoiceField(required=False, empty_value=None)
    all_tools = forms.BooleanField(
        required=False, initial=True, help_text="All tools of the catalogue, also those that are added later."
    )
    tools = forms.MultipleChoiceField(required=False, help_text="If *All tools* is off: only these.")
    parameters = ObjectField(help_text=f"Instead of the model's: JSON with any of {', '.join(PARAMETERS)}.")
    credit_approval_threshold = CreditsField(
        required=False,
        label="Approval threshold",
        help_text="Credits: calls with a higher estimate wait for an approval. A request may name another. Empty: "
        "CREDIT_APPROVAL_THRESHOLD.",
    )
    max_credits = CreditsField(
        required=False,
        minimum=1,
        label="Budget",
        help_text="Credits: the most that a run may spend. A request may only lower it. Empty: no limit.",
    )
    on_credits_exhausted = forms.TypedChoiceField(
        required=False,
        empty_value=OnCreditsExhausted.FAIL.value,
        choices=OnCreditsExhausted.choices,
        initial=OnCreditsExhausted.FAIL,
        label="When credits run out",
        help_text="What a run does if its credits or its budget are too low for its next step. A request may choose "
        "otherwise.",
    )
    output_schema = ObjectField(
        help_text="The JSON Schema of an object: runs answer with an output that fits it. {}: with text."
    )

    class Meta:
        model = Agent
        fields = ["name", "display_name", "description", "enabled"]
        field_classes: ClassVar = {"description": LinesField}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "name" not in self.fields:
            return  # for staff who may only look
        agent, content = self.instance, dict[str, Any]()
        if agent.pk:
            version = agent.versions.get(number=agent.version)
            content = {column: value for column in agents.CONTENT if (value := getattr(version, column)) is not None}
            self.initial.update(content, all_tools=version.tools is None)
            self.fields["name"].disabled = True
        else:
            self.fields["name"].help_text = "Requests use it. It cannot be changed later."
        # What the version names may have been deleted. Without it, a save would silently choose something else.
        fields: dict[str, Any] = self.fields
        fields["model"].choices = [("", "The default model"), *_choices(AgentModel, content.get("model"))]
        fields["tools"].choices = _choices(Tool, *content.get("tools") or ())

    def clean(self) -> dict[str, Any]:
        data = super().clean() or {}
        self.columns = {name: data.get(name) for name in (*AgentForm.Meta.fields, *agents.CONTENT)}
        self.columns["tools"] = None if data.get("all_tools") else data.get("tools")
        self.columns["output_schema"] = data.get("output_schema") or None
        if not self.errors:
            for column, problems in agents.problems_of(self.columns).items():
                self.add_error(column, problems)
        return data


def _choices(model: type[AgentModel | Tool], *used: str | None) -> list[tuple[str, str]]:
    names = model.objects.order_by("name").values_list("name", flat=True)
    return [(name, name) for name in dict.fromkeys([*names, *filter(None, used)])]


def lines(version: AgentVersion) -> list[str]:
    amounts = {"approval threshold": version.credit_approval_threshold, "budget": version.max_credits}
    found = [f"model: {version.model or 'the default one'}"]
    found += [f"{name}: {'–' if amount is None else money.to_text(amount)}" for name, amount in amounts.items()]
    found.append(f"when credits run out: {version.get_on_credits_exhausted_display()}")
    found += ["tools:", *(["all"] if version.tools is None else sorted(version.tools))]
    for name, value in (("parameters", version.parameters), ("output schema", version.output_schema)):
        found += [f"{name}:", *("–" if not value else to_text(value, indent=2)).split("\n")]
    return [*found, "instructions:", *version.instructions.split("\n")]


@admin.register(Agent)
class AgentAdmin(CatalogueAdmin):
    table = "agents"
    form = AgentForm
    list_display = ("name", "display_name", "version", "enabled")
    view_fields = (*AgentForm.Meta.fields, "version", "content")
    actions_detail = ("versions", "playground")

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False  # runs name it; staff disable it instead

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        agent, form.changed = agents.save(**form.columns)
        obj.pk, obj.version = agent.pk, agent.version

    def construct_change_message(self, request: HttpRequest, form: Any, formsets: Any, add: bool = False) -> Any:
        is_new_version = not agents.CONTENT.keys().isdisjoint(form.changed)
        what = f"Version {form.instance.version}" if is_new_version else "No new version"
        return f"{what}: {', '.join(form.changed) or 'nothing changed'}."

    def content(self, agent: Agent) -> str:
        version = agent.versions.get(number=agent.version)
        return format_html('<pre class="staff-text">{}</pre>', "\n".join(lines(version)))

    def get_actions_detail(self, request: HttpRequest, object_id: Any) -> Any:
        actions = super().get_actions_detail(request, object_id)
        return [one for one in actions if settings.PLAYGROUND or one.path != "playground"]

    @action(description="Try in the playground", icon="chat", url_path="playground", permissions=["view"])
    def playground(self, request: HttpRequest, object_id: str) -> HttpResponse:
        return HttpResponseRedirect(f"/playground#{urlencode({'agent': self.row(request, object_id).name})}")

    @action(description="Versions", icon="history", permissions=["view"])
    def versions(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """The versions, newest first, and two of them side by side; POST makes one the current one."""
        agent = self.row(request, object_id)
        may_change = self.has_change_permission(request, agent)
        if request.method == "POST":
            if not may_change:
                raise PermissionDenied
            number = _number(request.POST.get("version"))
            try:
                agents.choose(agent.name, number)
            except AgentVersion.DoesNotExist:
                raise Http404 from None
            self.log_change(request, agent, f"Chose version {number}.")
            messages.success(request, f"New runs get {agent.name}@{number}.")
            return HttpResponseRedirect(self.url("versions", agent.pk))
        versions = list(agent.versions.all()[:VERSIONS_MAX])
        right = _number(request.GET.get("right")) or agent.version
        left = _number(request.GET.get("left")) or max(right - 1, 1)
        found = {version.number: version for version in agent.versions.filter(number__in=[left, right])}
        if {left, right} - found.keys():
            raise Http404
        may_see_runs = request.user.has_perm("runs.view_run")
        before, after = lines(found[left]), lines(found[right])
        shown = {"versions": _described(agent, versions, may_see_runs), "left": left, "right": right}
        shown |= {"difference": difference(before, after), "whole": "\n".join(after)}
        shown |= {"may_change": may_change, "may_see_runs": may_see_runs}
        shown |= {"runs_max": RUNS_MAX, "lines_max": COMPARED_LINES_MAX}
        return self.page(request, "admin/runs/agent/versions.html", "Versions", agent, **shown)


def _described(agent: Agent, versions: list[AgentVersion], with_runs: bool) -> list[dict[str, Any]]:
    """Each version with who made it, what changed in it and how its latest runs went."""
    entries = LogEntry.objects.filter(content_type=ContentType.objects.get_for_model(Agent), object_id=str(agent.pk))
    made = entries.filter(change_message__startswith="Version ").values_list("change_message", "user__username")
    authors = {message.partition(":")[0].removeprefix("Version "): name for message, name in made}
    used = _use([version.reference for version in versions]) if with_runs else {}
    return [
        {
            "version": version,
            "author": authors.get(str(version.number), "catalogue file"),
            "changed": ", ".join(
                column.replace("_", " ")
                for column in agents.CONTENT
                if before is not None and agents.differs(before, column, getattr(version, column))
            ),
            "use": used.get(version.reference),
        }
        for version, before in zip_longest(versions, versions[1:])
    ]


def _use(references: list[str]) -> dict[str, dict[str, Any]]:
    """How the latest runs went, by the agent's version: averages of their running time and credits."""
    since = first_id("run", clock.now() - timedelta(days=RUN_DAYS))
    ended = Run.objects.filter(agent__in=references, pk__gte=since, finished_at__isnull=False).order_by("-pk")
    latest = Run.objects.filter(pk__in=list(ended.values_list("pk", flat=True)[:RUNS_MAX])).order_by()
    cancelled, completed = (Count("pk", filter=Q(status=end)) for end in (RunStatus.CANCELLED, RunStatus.COMPLETED))
    numbers = {"count": Count("pk"), "cancelled": cancelled, "completed": completed, "took": Avg("ran_ms")}
    by_agent = latest.annotate(spent=sums.run_spent_subquery()).values("agent")
    found: Any = by_agent.annotate(**numbers, credits=Avg("spent"))
    return {
        str(use["agent"]): {
            "count": use["count"],
            "success": f"{use['completed'] / judged:.0%}" if (judged := use["count"] - use["cancelled"]) else "–",
            "took": span(timedelta(milliseconds=use["took"])),
            "credits": amount(int(use["credits"])),
        }
        for use in found
    }


def _number(text: str | None) -> int:
    return int(text) if text and is_number(text) else 0


def difference(left: list[str], right: list[str]) -> list[tuple[str, str, bool]] | None:
    """(left, right, whether they differ) of the lines that differ, and of some equal lines around them; None if there
    are too many lines to compare.
    """
    if max(len(left), len(right)) > COMPARED_LINES_MAX:
        return None
    return [
        (one, other, kind != "equal")
        for group in SequenceMatcher(None, left, right).get_grouped_opcodes()
        for kind, a, b, c, d in group
        for one, other in zip_longest(left[a:b], right[c:d], fillvalue="")
    ]
