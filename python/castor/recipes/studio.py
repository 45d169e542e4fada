"""`castor studio`: a page for one user of this machine, whose buttons run castor's commands.

What imports gradio is imported within functions: `castor --help` imports this file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from castor.recipes import require
from castor.recipes.serve import listening, server_of

_GRACE_SECONDS = 1
"""Seconds that the page's open streams have when the studio ends."""
_OTHERS = ("evaluate", "export")
"""Commands that have a tab of the page where castor has them."""


def studio(
    context: typer.Context,
    workspace: Annotated[
        Path, typer.Option(help="Folder of data, recipes, runs and logs; made if it is not there.")
    ] = Path("~/castor-studio"),
    port: Annotated[
        int, typer.Option(help="Port on this machine; 0: a free one.", min=0, max=65535)
    ] = 7860,
    max_upload: Annotated[str, typer.Option(help="Size of an uploaded file.")] = "4GiB",
) -> None:
    """Open a page on this machine: data, recipe, training, chat and serving."""
    from castor.config import parse_bytes

    upload_bytes = parse_bytes(max_upload, "--max-upload")
    require("castor studio", "gradio", "openai", remedy="'castor-torch[studio]'")
    require("castor studio", "fastapi", "uvicorn", "yaml", "pydantic", "trl", "datasets")
    with contextlib.closing(listening("127.0.0.1", port)) as listener:
        from castor.recipes.studio_gate import TokenGate
        from castor.recipes.studio_jobs import Workspace

        place = Workspace.at(workspace)
        # gradio reads these when it is imported: no statistics, and uploads stay in the workspace.
        os.environ |= {
            "GRADIO_ANALYTICS_ENABLED": "False",
            "GRADIO_TEMP_DIR": str(place.root / "uploads"),
        }
        from castor.recipes.studio_page import make_app

        root: Any = context.find_root().command
        has = [name for name in _OTHERS if name in root.list_commands(context)]
        token, own = secrets.token_urlsafe(32), listener.getsockname()[1]
        app = TokenGate(make_app(place, has, upload_bytes), token=token, port=own)
        server = server_of(app, grace_seconds=_GRACE_SECONDS)
        typer.echo(
            f"castor studio: http://127.0.0.1:{own}/?token={token}\n"
            f"workspace: {place.root}; Ctrl-C ends the page, and what it has started goes on",
            err=True,
        )
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
