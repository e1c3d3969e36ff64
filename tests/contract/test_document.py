"""The OpenAPI document: it matches the routes, its examples are valid, and its committed copy is up to date."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from django.conf import settings
from drf_spectacular.generators import SchemaGenerator
from jsonschema import Draft202012Validator

from config.api import openapi as texts
from runs.events import StreamType
from tests.contract.routes import operations, patterns, surface_of


@cache
def document() -> dict[str, Any]:
    made: dict[str, Any] = SchemaGenerator().get_schema(request=None, public=True)
    return made


def described() -> dict[str, dict[str, Any]]:
    """Return every operation of the document by method and path."""
    return {
        f"{method.upper()} {path}": operation
        for path, methods in document()["paths"].items()
        for method, operation in methods.items()
    }


def resolve(schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({"components": document()["components"], **schema})


# The operations of plain views, which the document's parts describe whole.
PLAIN = {"POST /api/callbacks/{token}"}


def test_the_document_has_exactly_the_routes():
    assert set(described()) == {str(operation) for operation in operations()} | PLAIN


def test_the_plain_operations_have_routes_and_say_how_they_are_secured():
    assert {name.partition(" /")[2] for name in PLAIN} <= {path for path, _ in patterns() if not surface_of(path)}
    callback = described()["POST /api/callbacks/{token}"]
    assert callback["security"] == []
    assert set(callback["responses"]) == {"200", "400", "401", "404", "413", "429", "431", "500", "503"}


@pytest.mark.parametrize("operation", operations(), ids=str)
def test_each_operation_has_a_description_and_its_security(operation):
    entry = described()[str(operation)]
    name = f"{operation.method} {operation.relative}"
    assert entry["summary"] == texts.described("operations")[name]["summary"]
    assert set(entry["tags"]) <= set(texts.described("tags"))
    if operation.surface == "session":
        assert entry["security"] == [{operation.credential: [operation.server_scope] if operation.server_scope else []}]
    else:
        assert entry["security"] == [{"apiKey": [operation.scope] if operation.scope else []}]
    for status, response in entry["responses"].items():
        if status >= "400":
            assert set(response) == {"$ref"}
            response = document()["components"]["responses"][response["$ref"].rpartition("/")[2]]
            assert response["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ApiError"}
        assert {"X-Request-Id", "X-RateLimit-Remaining"} <= set(response["headers"])


def test_every_text_belongs_to_an_operation_component_or_tag():
    assert {f"{operation.method} {operation.relative}" for operation in operations()} == set(
        texts.described("operations")
    )
    assert set(texts.described("components")) <= set(document()["components"]["schemas"])
    assert {tag["name"] for tag in document()["tags"]} == {
        tag for entry in described().values() for tag in entry["tags"]
    }


def test_the_examples_match_their_schemas():
    found = 0
    for entry in [*described().values(), *(hook["post"] for hook in document()["webhooks"].values())]:
        for part in [entry.get("requestBody", {}), *entry["responses"].values()]:
            content = part.get("content", {}).get("application/json", {})
            for example in content.get("examples", {}).values():
                resolve(content["schema"]).validate(example["value"])
                found += 1
    for response in document()["components"]["responses"].values():
        content = response["content"]["application/json"]
        for example in content["examples"].values():
            resolve(content["schema"]).validate(example["value"])
    assert found > 2 * sum("answered" in text for text in texts.described("operations").values())


def test_version_and_both_surfaces():
    assert document()["openapi"].startswith("3.1.")
    assert document()["info"]["version"] == "1.0.0"
    assert set(document()["components"]["securitySchemes"]) == {"sessionToken", "apiKey", "serverKey"}
    assert [server["description"] for server in document()["servers"]] == ["This service", "Production"]


def test_the_webhooks_have_their_headers():
    assert set(document()["webhooks"]) >= {"agent.started", "agent.completed", "agent.failed", "tool.completed"}
    for hook in document()["webhooks"].values():
        names = {parameter["name"] for parameter in hook["post"]["parameters"]}
        assert {
            "X-Service-Signature",
            "X-Service-Timestamp",
            "X-Service-Event-Id",
            "X-Service-Delivery-Attempt",
            "webhook-signature",
        } <= names


@pytest.mark.parametrize("surface", ["v1", "public/v1"])
def test_the_streams_name_each_type_of_event(surface):
    description = described()[f"GET /api/{surface}/runs/{{runId}}/stream"]["description"]
    assert [kind for kind in StreamType if kind not in description] == []


def test_the_committed_copy_is_up_to_date():
    committed = json.loads((settings.BASE_DIR / "docs" / "openapi.json").read_text())
    fresh = json.loads(json.dumps(document(), default=str))
    for copy in (committed, fresh):
        # These depend on the installation.
        copy.pop("servers")
        copy["info"].pop("contact")
    assert committed == fresh, "make schema"


def fields_of(schema: dict[str, Any], place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each field within a schema, at any depth, with its place. References are not followed."""
    for name, shape in schema.get("properties", {}).items():
        yield f"{place}.{name}", shape
        yield from fields_of(shape, f"{place}.{name}")
    parts = [schema["items"]] if "items" in schema else []
    for part in [*parts, *(each for keyword in ("allOf", "oneOf", "anyOf") for each in schema.get(keyword, []))]:
        yield from fields_of(part, place)


def test_every_operation_parameter_field_and_answer_has_a_description():
    found: dict[str, dict[str, Any]] = {}
    hooks = {f"webhook {name}": hook["post"] for name, hook in document()["webhooks"].items()}
    for place, entry in (described() | hooks).items():
        found[place] = entry
        found |= {f"{place} {parameter['name']}": parameter for parameter in entry.get("parameters", ())}
        found |= {f"{place} {status}": answer for status, answer in entry["responses"].items() if "$ref" not in answer}
        for part in [entry.get("requestBody", {}), *entry["responses"].values()]:
            for content in part.get("content", {}).values():
                found |= dict(fields_of(content["schema"], place))
    for kind, components in document()["components"].items():
        for name, component in components.items():
            found[f"{kind} {name}"] = component
            if kind == "schemas":
                found |= dict(fields_of(component, name))
    found |= {f"tag {tag['name']}": tag for tag in document()["tags"]}
    assert [place for place, entry in found.items() if not entry.get("description", "").strip()] == []
    assert len(found) > 500


def test_license_and_contact_are_named():
    assert document()["info"]["license"] == {"name": "MIT", "identifier": "MIT"}
    assert document()["info"]["contact"]["url"] == settings.BASE_URL


def test_unknown_fields_and_missing_bodies_are_refused_in_the_document():
    for name, operation in described().items():
        body = operation.get("requestBody")
        if body is None or name in PLAIN:
            continue
        schema = body["content"]["application/json"]["schema"]
        validator = resolve(schema)
        assert not validator.is_valid({"unknown": 1})
        assert body.get("required", False) is not validator.is_valid({})


def test_no_default_makes_a_field_required():
    for name, schema in document()["components"]["schemas"].items():
        assert [field for field, shape in fields_of(schema, name) if "default" in shape] == []
