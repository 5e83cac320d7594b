"""The OpenAPI document, made from the schemas that bodies are checked by and answers written with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema

from pie.router.api.chat import ChatBody
from pie.router.api.chat_answers import ChatChunk, ChatCompletion
from pie.router.api.completions import Completion, CompletionBody
from pie.router.api.explained import Explained, ExplainedList
from pie.router.api.inferlets import (
    Done,
    Inferlet,
    InferletList,
    InstallBody,
    MessageBody,
    RunBody,
    RunEvent,
)
from pie.router.api.listing import ApiErrorBody, Model, ModelList
from pie.router.api.places import DrainBody, WorkerDrained, WorkerTakesAgain
from pie.router.api.policies import Applied, ApplyBody, PolicyEvents, PolicyReport, PolicyText
from pie.router.api.responses import ResponsesBody
from pie.router.api.responses_answers import Response, ResponseEvent
from pie.router.api.tokens import (
    DetokenizeBody,
    Detokenized,
    EmbeddingsBody,
    TokenizeConversation,
    Tokenized,
    TokenizeText,
)
from pie.router.responding import Deleted
from pie.router.status import ClusterStatus

_REF = "#/components/schemas/"
ANSWER_HEADERS = {
    "x-pie-request-id": "The request's name in logs.",
    "x-pie-worker": "The worker that gave the first token.",
    "x-pie-cached-tokens": "Prompt tokens that were not computed.",
    "x-pie-cached-from": "Where they came from: `device=480,pool=32`.",
    "x-pie-load": "Why pages were loaded or computed, tier by tier.",
}
"""What an answer says of itself, with a sentence about each."""
_PLACE_HEADER = {
    "name": "x-pie-place",
    "in": "header",
    "required": False,
    "schema": {"type": "string"},
    "description": "Name of the one worker that may answer; for tools and tests. Refused where "
    "`router.allow_place_header` is off.",
}


def document() -> dict[str, Any]:
    """Return the OpenAPI document of the router."""
    _, bodies = models_json_schema(
        [
            (kind, "validation")
            for kind in (
                ChatBody,
                CompletionBody,
                TokenizeText,
                TokenizeConversation,
                DetokenizeBody,
                EmbeddingsBody,
                ResponsesBody,
                InstallBody,
                RunBody,
                MessageBody,
            )
        ],
        ref_template=_REF + "{model}",
    )
    _, answers = msgspec.json.schema_components(
        [
            ChatCompletion,
            ChatChunk,
            Completion,
            Response,
            ResponseEvent,
            Deleted,
            Tokenized,
            Detokenized,
            Model,
            ModelList,
            ApiErrorBody,
            ClusterStatus,
            Explained,
            ExplainedList,
            Inferlet,
            InferletList,
            RunEvent,
            Done,
            PolicyReport,
            PolicyText,
            PolicyEvents,
            ApplyBody,
            Applied,
            DrainBody,
            WorkerDrained,
            WorkerTakesAgain,
        ],
        ref_template=_REF + "{name}",
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pie", "version": _version()},
        "paths": {
            "/v1/chat/completions": _generation("ChatBody", "ChatCompletion", "ChatChunk"),
            "/v1/completions": _generation("CompletionBody", "Completion", "Completion"),
            "/v1/responses": _generation("ResponsesBody", "Response", "ResponseEvent"),
            "/v1/responses/{response_id}": {
                "get": _answer("A response that is kept.", "Response"),
                "delete": _answer("Forget a response.", "Deleted"),
            }
            | _in_path("response_id"),
            "/v1/embeddings": _asked("Refused: no model here has any.", None, "EmbeddingsBody"),
            "/tokenize": _asked(
                "The ids of a text or a conversation.",
                "Tokenized",
                "TokenizeText",
                "TokenizeConversation",
            ),
            "/detokenize": _asked("The text of token ids.", "Detokenized", "DetokenizeBody"),
            "/v1/models": {"get": _answer("The models that can be asked for.", "ModelList")},
            "/v1/models/{model}": {
                "get": _answer("One model.", "Model") | _in_path("model"),
            },
            "/v1/inferlets": {
                "get": _answer("The programs that are kept.", "InferletList"),
                "post": _answer("Install a program.", "Inferlet", "InstallBody"),
            },
            "/v1/inferlets/{id}": {"delete": _answer("Forget a program.", "Done")} | _in_path("id"),
            "/v1/inferlets/{id}/runs": {"post": _program_run()} | _in_path("id"),
            "/v1/inferlet-runs/{run}": {"delete": _answer("End a run.", "Done")} | _in_path("run"),
            "/v1/inferlet-runs/{run}/messages": {
                "post": _answer("Send a run a message.", "Done", "MessageBody")
            }
            | _in_path("run"),
            "/health": {"get": _answer("The router runs.", None)},
            "/ready": {"get": _answer("Requests can be answered; 503 says why not.", None)},
            "/status": {"get": _answer("The cluster as this router sees it.", "ClusterStatus")},
            "/metrics": {"get": _answer("Prometheus metrics, as text.", None)},
            "/admin/requests": {"get": _answer("Requests that can be explained.", "ExplainedList")},
            "/admin/policies": {
                "get": _answer(
                    "Versions of the policies, and what every place runs.", "PolicyReport"
                ),
                "post": _answer("Put a policy file in force everywhere.", "Applied", "ApplyBody"),
            },
            "/admin/policies/events": {
                "get": _answer("What cluster policies did, the newest first.", "PolicyEvents")
            },
            "/admin/policies/versions/{version}": {
                "get": _answer("The text of one version of the policies.", "PolicyText")
            }
            | _in_path("version"),
            "/admin/workers/{worker}/drain": {
                "post": _answer(
                    "Let a worker leave: no more requests, and its pages go to the pool.",
                    "WorkerDrained",
                    "DrainBody",
                ),
                "delete": _answer(
                    "Let a worker take requests again that was drained.", "WorkerTakesAgain"
                ),
            }
            | _in_path("worker"),
            "/admin/requests/{request_id}": {
                "get": _answer("What became of one request, and why.", "Explained")
                | _in_path("request_id"),
            },
        },
        "components": {
            "schemas": bodies.get("$defs", {}) | answers,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _generation(body: str, answer: str, chunk: str) -> dict[str, Any]:
    """Return the path of an endpoint that generates."""
    return {
        "post": {
            "summary": "Generate text.",
            "parameters": [_PLACE_HEADER],
            "requestBody": _body(body),
            "responses": {
                "200": {
                    "description": "The answer; with `stream`, events that end with `[DONE]`.",
                    "headers": {
                        name: {"schema": {"type": "string"}, "description": told}
                        for name, told in ANSWER_HEADERS.items()
                    },
                    "content": {
                        "application/json": {"schema": {"$ref": _REF + answer}},
                        "text/event-stream": {"schema": {"$ref": _REF + chunk}},
                    },
                },
                "default": _error(),
            },
        }
    }


def _asked(summary: str, answer: str | None, *bodies: str) -> dict[str, Any]:
    """Return the path of an endpoint that answers one of some bodies."""
    shapes: list[dict[str, Any]] = [{"$ref": _REF + body} for body in bodies]
    shape = shapes[0] if len(shapes) == 1 else {"anyOf": shapes}
    body = {"required": True, "content": {"application/json": {"schema": shape}}}
    return {"post": _answer(summary, answer) | {"requestBody": body}}


def _in_path(name: str) -> dict[str, Any]:
    """Return the one parameter of a path."""
    schema = {"type": "string"}
    return {"parameters": [{"name": name, "in": "path", "required": True, "schema": schema}]}


def _program_run() -> dict[str, Any]:
    """Return the operation that runs a program."""
    shape = {"text/event-stream": {"schema": {"$ref": _REF + "RunEvent"}}}
    told = "What the program says and prints, and its end; then `[DONE]`."
    return {
        "summary": "Run a program.",
        "requestBody": _body("RunBody"),
        "responses": {"200": {"description": told, "content": shape}, "default": _error()},
    }


def _answer(summary: str, schema: str | None, body: str | None = None) -> dict[str, Any]:
    """Return an operation that answers with one schema, or with anything."""
    shape = {"$ref": _REF + schema} if schema else {}
    content = {"application/json": {"schema": shape}}
    asked = {} if body is None else {"requestBody": _body(body)}
    return asked | {
        "summary": summary,
        "responses": {"200": {"description": summary, "content": content}, "default": _error()},
    }


def _body(schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF + schema}}}
    return {"required": True, "content": content}


def _error() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF + "ApiErrorBody"}}}
    return {"description": "What is wrong.", "content": content}


def _version() -> str:
    try:
        return version("pie-serve")
    except PackageNotFoundError:
        return "0"
