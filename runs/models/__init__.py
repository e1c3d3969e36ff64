"""The tables of this app. Only ``runs.lifecycle`` writes a status."""
# ruff: noqa: F401

from runs.models.catalogue import (
    OUTPUT_TOOL,
    RESERVED_TOOL_NAMES,
    Agent,
    AgentModel,
    AgentVersion,
    OnCreditsExhausted,
    Provider,
    ProviderUse,
    Tool,
    TypicalCredits,
)
from runs.models.journal import (
    FINAL_INVOCATION_STATUSES,
    Compaction,
    CompactionKind,
    CountedBeginning,
    InvocationStatus,
    ModelAttempt,
    ToolInvocation,
    Turn,
    Waitpoint,
    WaitpointKind,
    WaitpointStatus,
)
from runs.models.runs import (
    FINAL_RUN_STATUSES,
    HAS_MODEL_OF_RUN,
    LIVE_RUN_STATUSES,
    MODEL_OF_RUN,
    TO_CANCEL,
    TO_TAKE_OVER,
    Awaiting,
    ClientRun,
    Run,
    RunEvent,
    RunMetadata,
    RunStatus,
    Worker,
)
