"""The OpenAPI document lists the errors, security scheme and parameters of each operation."""

import pytest
from django.urls import include, path
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.validation import validate_schema

import apikeys.urls
from config.api import views

session = [path("me", views.MeViewSet.as_view({"get": "retrieve"})), *apikeys.urls.session]


class Routes:
    urlpatterns = [path("api/v1/", include(session)), path("api/public/v1/", include(apikeys.urls.public))]


@pytest.fixture(scope="module")
def document():
    return SchemaGenerator(patterns=Routes.urlpatterns).get_schema(request=None, public=True)


def statuses(operation: dict) -> set[str]:
    return set(operation["responses"])


@pytest.mark.slow
def test_the_whole_document_is_valid_and_without_warnings(capsys):
    document = SchemaGenerator().get_schema(request=None, public=True)
    validate_schema(document)
    assert capsys.readouterr().err == ""
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert all(operation["tags"] for operation in operations)
    # The address of a tool's callback is its credential.
    open_to_all = [operation["operationId"] for operation in operations if not operation["security"]]
    assert open_to_all == ["callbacksReceive"]


def test_it_is_served(client):
    response = client.get("/api/schema")
    assert response.status_code == 200
    assert b"openapi: 3.1.0" in response.content
    assert client.get("/api/docs").status_code == 200


def test_it_is_generated_once_and_not_sent_again(client, monkeypatch):
    first = client.get("/api/schema")
    monkeypatch.setattr(SchemaGenerator, "get_schema", None)
    assert client.get("/api/schema").content == first.content
    again = client.get("/api/schema", headers={"If-None-Match": first["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.head("/api/schema")["ETag"] == first["ETag"]


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("query", "accept"), [("?format=json", "*/*"), ("?format=json", "text/html"), ("", "application/json")]
)
def test_it_is_served_as_json(client, query, accept):
    response = client.get(f"/api/schema{query}", headers={"Accept": accept})
    assert response.json()["openapi"] == "3.1.0"
    assert response["ETag"] != client.get("/api/schema?format=yaml")["ETag"]


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("query", "accept", "code"), [("?format=xml", "*/*", "NOT_FOUND"), ("", "text/html", "NOT_ACCEPTABLE")]
)
def test_its_errors_are_in_json(client, query, accept, code):
    response = client.get(f"/api/schema{query}", headers={"Accept": accept})
    assert response.json()["error"]["code"] == code


@pytest.mark.django_db
@pytest.mark.parametrize("path", ["/api/schema", "/api/docs"])
@pytest.mark.parametrize("method", ["post", "options"])
def test_it_is_only_read(client, path, method):
    response = getattr(client, method)(path)
    assert (response.status_code, response["Allow"]) == (405, "GET, HEAD")
    assert response.json()["error"]["code"] == "METHOD_NOT_ALLOWED"


def test_it_is_served_without_webhooks(client):
    whole = client.get("/api/schema?format=json").json()
    assert whole.pop("webhooks")
    assert client.get("/api/schema/without-webhooks?format=json").json() == whole


@pytest.mark.parametrize(("surface", "prefix"), [("session", "/api/v1/"), ("public", "/api/public/v1/")])
def test_each_surface_has_a_document_of_its_own(client, surface, prefix):
    whole = client.get("/api/schema?format=json").json()
    part = client.get(f"/api/schema/{surface}?format=json").json()
    assert part["paths"] == {path: methods for path, methods in whole["paths"].items() if path.startswith(prefix)}
    assert part["paths"]
    assert ("webhooks" in part) is (surface == "session")
    assert {tag["name"] for tag in part["tags"]} == {
        tag for methods in part["paths"].values() for operation in methods.values() for tag in operation["tags"]
    }
    assert f"/api/schema/{surface}?format=json" in client.get("/static/docs/options.js").getvalue().decode()


def test_every_error_is_the_envelope(document):
    for methods in document["paths"].values():
        for operation in methods.values():
            for status, response in operation["responses"].items():
                if status >= "400":
                    answer = document["components"]["responses"][response["$ref"].rpartition("/")[2]]
                    assert answer["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ApiError"}
    assert document["components"]["schemas"]["ApiError"]["required"] == ["error"]


def test_each_operation_has_its_statuses(document):
    always = {"400", "401", "406", "429", "431", "500", "503"}
    create = document["paths"]["/api/v1/api-keys"]["post"]
    assert statuses(create) == always | {"201", "409", "413", "415"}
    assert statuses(document["paths"]["/api/v1/api-keys"]["get"]) == always | {"200"}
    assert statuses(document["paths"]["/api/v1/api-keys/{keyId}"]["delete"]) == always | {"204", "404"}
    assert statuses(document["paths"]["/api/v1/me"]["get"]) == always | {"200"}
    assert statuses(document["paths"]["/api/public/v1/key"]["get"]) == always | {"200"}


def test_names_schemes_and_parameters(document):
    create = document["paths"]["/api/v1/api-keys"]["post"]
    destroy = document["paths"]["/api/v1/api-keys/{keyId}"]["delete"]
    own = document["paths"]["/api/public/v1/key"]["get"]
    assert [operation["operationId"] for operation in (create, destroy, own)] == [
        "sessionApiKeysCreate",
        "sessionApiKeysDestroy",
        "publicKeyRetrieve",
    ]
    assert [operation["security"] for operation in (create, own)] == [[{"sessionToken": []}], [{"apiKey": []}]]
    assert {"sessionToken", "apiKey"} <= set(document["components"]["securitySchemes"])
    assert "Idempotency-Key" in [parameter["name"] for parameter in create["parameters"]]
    (key,) = destroy["parameters"]
    assert key.pop("description")
    assert key == {"in": "path", "name": "keyId", "schema": {"type": "string", "minLength": 1}, "required": True}


def test_only_one_answer_contains_the_secret(document):
    schemas = document["components"]["schemas"]
    assert [name for name, schema in schemas.items() if "secret" in schema.get("properties", {})] == ["CreatedApiKey"]
