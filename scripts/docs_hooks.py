"""MkDocs hooks: pages load nothing from other hosts, so that search also works from disk."""

from typing import Any

_REMOTE = "https://unpkg.com/iframe-worker/shim"
_LOCAL = "assets/frame-worker.js"


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Replaces the theme's remote script for search from disk by a local one."""
    return output.replace(_REMOTE, "../" * page.url.count("/") + _LOCAL)


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    """Does the same for pages without a source, such as 404.html, which are at the root."""
    return output_content.replace(_REMOTE, _LOCAL)
