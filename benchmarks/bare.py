"""Baselines: an empty Celery task, a task that records its start, and views that return one row by primary key, with
DRF and without.
"""

import time
from functools import cache

import redis
from celery import shared_task
from django.http import HttpRequest, JsonResponse
from django.urls import path
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from chats.models import Chat


class OneRow(APIView):
    def get(self, request: Request, chat_id: str) -> Response:
        chat = Chat.objects.get(pk=chat_id)
        return Response({"id": chat.pk, "title": chat.title})


def plain(request: HttpRequest, chat_id: str) -> JsonResponse:
    chat = Chat.objects.get(pk=chat_id)
    return JsonResponse({"id": chat.pk, "title": chat.title})


urlpatterns = [path("bare/<str:chat_id>", OneRow.as_view()), path("plain/<str:chat_id>", plain)]


@shared_task(name="benchmarks.empty")
def empty(number: int) -> None:
    pass


@cache
def client(url: str) -> redis.Redis:
    return redis.Redis.from_url(url)


@shared_task(name="benchmarks.begun")
def begun(url: str, key: str) -> None:
    """Push the time in seconds since the epoch to a Redis list."""
    now = time.time()
    client(url).rpush(key, now)
