"""What clients of other protocols name, and the runs that it stands for."""

from django.db import models

from chats.models import Chat
from runs.models.runs import Run

CLIENT_MESSAGE_ID_MAX_CHARS = 128


class ClientRun(models.Model):
    """The run that a client's request started, so that the same request again starts nothing.

    ``key`` is the digest of the client's own name of the request; ``index`` the event of the run after which that name
    begins. ``run`` changes when another run replaces it. ``message_id`` is the client's id of the user's message, if
    the protocol repeats messages.
    """

    chat = models.ForeignKey(Chat, models.CASCADE, related_name="client_runs", db_index=False)
    run = models.ForeignKey(Run, models.CASCADE, related_name="client_runs")
    key = models.CharField(max_length=64)
    index = models.PositiveIntegerField(default=0)
    message_id = models.CharField(max_length=CLIENT_MESSAGE_ID_MAX_CHARS, default="")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["chat", "key"], name="client_run_once_per_key")]

    def __str__(self) -> str:
        return f"{self.run_id} of a client"
