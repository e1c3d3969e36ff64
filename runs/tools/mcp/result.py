"""Translates the result of an MCP server's tool into a result of this service."""

import base64

import mcp_types
from mcp_types import CallToolResult, ContentBlock, EmbeddedResource, ImageContent, ResourceLink, TextContent

from runs.tools.base import ToolDefinition, ToolImage, ToolResult, is_address, result_text, tool_error
from runs.tools.files import image_of


def read_result(definition: ToolDefinition, result: CallToolResult) -> ToolResult:
    """Text unchanged, links as addresses, images, and for other content only its type. Raises ToolFailure."""
    parts, urls, images = list[str](), list[str](), list[ToolImage]()
    for block in result.content:
        if isinstance(block, TextContent):
            parts.append(block.text)
        elif isinstance(block, ResourceLink):
            uri = str(block.uri)
            if is_address(uri):
                urls.append(uri)
            parts.append(f"{block.title or block.name}: {uri}")
        elif isinstance(block, EmbeddedResource) and isinstance(block.resource, mcp_types.TextResourceContents):
            parts.append(block.resource.text)
        elif image := _image(block):
            images.append(image)
        else:
            kind = getattr(getattr(block, "resource", block), "mime_type", None) or block.type
            parts.append(f"[{kind}, which is not text]")
    if not parts and result.structured_content is not None:
        parts.append(result_text(definition.name, result.structured_content))
    text = "\n".join(parts)
    if result.is_error:
        raise tool_error(definition.without_secrets(text) or f"{definition.name} failed.")
    return ToolResult(text, tuple(urls), images=tuple(images))


def _image(block: ContentBlock) -> ToolImage | None:
    """The image of a block, whose data is base64 text; None for other content."""
    if isinstance(block, ImageContent):
        data, kind = block.data, block.mime_type
    elif isinstance(block, EmbeddedResource) and isinstance(block.resource, mcp_types.BlobResourceContents):
        data, kind = block.resource.blob, block.resource.mime_type or ""
    else:
        return None
    try:
        return image_of(base64.b64decode(data, validate=True), kind)
    except ValueError:
        return None
