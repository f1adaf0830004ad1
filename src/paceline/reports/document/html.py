"""Renders reports and pages as self-contained HTML, without scripts or external resources.

Pictures are embedded as data, and the inline style is allowed by its hash. All text is escaped. The
content security policy in the page's head forbids everything else, so that a malicious name in a
record is harmless even if escaping fails.
"""

import base64
import hashlib
from importlib import resources

from paceline.reports.document.model import Page, Report


def render_html(report: Report) -> str:
    """Renders a report."""
    return _render("report.html.jinja", report=report)


def render_page(page: Page) -> str:
    """Renders a page about one subject, such as a run."""
    return _render("page.html.jinja", page=page)


def _render(template: str, **document: Page | Report) -> str:
    import jinja2

    files = resources.files("paceline.reports.document")
    style = files.joinpath("report.css").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: files.joinpath(name).read_text(encoding="utf-8")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode("ascii")
    # The content security policy allows the inline style by this hash.
    style_hash = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode("ascii")
    return environment.get_template(template).render(style=style, style_hash=style_hash, **document)
