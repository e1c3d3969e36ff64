"""Translates the result of an MCP server's tool into a result of this service."""

import base64
from contextlib import suppress
from typing import Any

from mcp_types import CallToolResult, ImageContent, ResourceLink, TextContent, TextResourceContents

from runs.tools.base import ToolDefinition, ToolImage, ToolResult, is_address, result_text, tool_error
from runs.tools.files import image_of


def read_result(definition: ToolDefinition, result: CallToolResult) -> ToolResult:
    """Text unchanged, links as addresses, images, and for other content only its type. Raises ToolFailure."""
    parts, urls, images = list[str](), list[str](), list[ToolImage]()
    for block in result.content:
        content = getattr(block, "resource", block)  # an embedded resource has the content of one
        if isinstance(content, TextContent | TextResourceContents):
            parts.append(content.text)
        elif isinstance(content, ResourceLink):
            uri = str(content.uri)
            urls += [uri] if is_address(uri) else []
            parts.append(f"{content.title or content.name}: {uri}")
        elif image := _image(content):
            images.append(image)
        else:
            parts.append(f"[{getattr(content, 'mime_type', None) or block.type}, which is not text]")
    if not parts and result.structured_content is not None:
        parts.append(result_text(definition.name, result.structured_content))
    text = "\n".join(parts)
    if result.is_error:
        raise tool_error(definition.without_secrets(text) or f"{definition.name} failed.")
    return ToolResult(text, tuple(urls), images=tuple(images))


def _image(content: Any) -> ToolImage | None:
    """The image of a content whose data is base64 text; None for other content."""
    data = content.data if isinstance(content, ImageContent) else getattr(content, "blob", "")
    with suppress(ValueError):
        return image_of(base64.b64decode(data, validate=True), getattr(content, "mime_type", None) or "")
    return None
