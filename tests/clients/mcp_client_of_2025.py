"""A conversation by the official MCP client of early 2025 (mcp 1.9), for the interpreter that has it."""

import asyncio
import json
import sys
from typing import Any

from mcp import ClientSession
from mcp.client.streamable_http import streamablehttp_client


async def main(url: str, key: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        streamablehttp_client(url, headers=headers) as (reader, writer, _),
        ClientSession(reader, writer) as session,
    ):

        async def call(name: str, **arguments: Any) -> Any:
            result = await session.call_tool(name, arguments)
            assert not result.isError, result
            return json.loads(result.content[0].text)

        revision = (await session.initialize()).protocolVersion
        await session.send_ping()
        tools = [tool.name for tool in (await session.list_tools()).tools]
        chat = await call("create_chat", title="By MCP")
        run = await call("start_run", chatId=chat["id"], message="/say Hello", waitSeconds=30)
        listed = [each["id"] for each in (await call("list_chats"))["items"]]
        refused = await session.call_tool("get_run", {"runId": "run_1"})
        return {
            "revision": revision,
            "tools": tools,
            "status": run["status"],
            "answer": run["answer"],
            "listed": chat["id"] in listed,
            "code": json.loads(refused.content[0].text)["error"]["code"] if refused.isError else None,
        }


print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
