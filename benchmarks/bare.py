"""Baselines: an empty Celery task, and a DRF view that reads one row by its primary key and answers it."""

from celery import shared_task
from django.urls import path
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from chats.models import Chat


class OneRow(APIView):
    def get(self, request: Request, chat_id: str) -> Response:
        chat = Chat.objects.get(pk=chat_id)
        return Response({"id": chat.pk, "title": chat.title})


urlpatterns = [path("bare/<str:chat_id>", OneRow.as_view())]


@shared_task(name="benchmarks.empty")
def empty(number: int) -> None:
    pass
