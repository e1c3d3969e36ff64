"""The state machine of runs, tool calls and waitpoints: the only writer of their statuses. Others use only these names.
``runs``, ``calls`` and ``waitpoints`` have a function for each transition, ``moves`` the guarded UPDATEs.
"""
# ruff: noqa: F401

from runs.lifecycle.calls import (
    dispatch_calls,
    due_contacts,
    keep_dialogue,
    park_call,
    record_call_result,
    record_contact,
    record_outcome,
    reject_new_call,
    take_contacts,
)
from runs.lifecycle.crash import crash_point
from runs.lifecycle.invariants import violations
from runs.lifecycle.line import EXECUTE
from runs.lifecycle.moves import LeaseLost, Moved, cancel_line
from runs.lifecycle.runs import (
    ChatChanged,
    RunFailed,
    claim,
    complete,
    end_request,
    enqueue,
    finish,
    hand_over,
    park_run,
    record_compaction,
    record_turn,
    request_cancel,
)
from runs.lifecycle.spending import Charge, Refusal, held_turn, hold_turn, refusal, spendable, wait_for_credits
from runs.lifecycle.sweeps import reap_workers, release_unexecuted, repair, sweep, take_due_runs, wakeable_runs
from runs.lifecycle.text import append_text, streamed_text
from runs.lifecycle.waitpoints import answer_waitpoint, expire_waitpoint, open_waitpoint, pause, resume_paid
