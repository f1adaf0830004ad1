"""MkDocs hooks: pages load nothing from other hosts, so that search also works from disk."""

import re
from typing import Any

_REMOTE = re.compile(r'https://[^"/]+/iframe-worker/shim')
_LOCAL = "assets/frame-worker.js"


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Replaces the theme's remote script for search from disk by a local one."""
    return _REMOTE.sub("../" * page.url.count("/") + _LOCAL, output)


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    """Does the same for pages without a source, such as 404.html, which are at the root."""
    return _REMOTE.sub(_LOCAL, output_content)
