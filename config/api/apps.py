from django.apps import AppConfig


class ApiConfig(AppConfig):
    name = "config.api"
    label = "api"
    verbose_name = "API"
