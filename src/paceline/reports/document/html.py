"""Reports and pages as one HTML file that loads nothing, runs nothing and escapes everything.

Everything is inside: pictures as data, the style by its hash. The policy in the page's head forbids
the browser the rest, so that a name in a record could not do anything even if it got past escaping.
"""

import base64
import hashlib
from importlib import resources

from paceline.reports.document.model import Page, Report


def render_html(report: Report) -> str:
    """Renders a report of many deliverables."""
    return _render("report.html.jinja", report=report)


def render_page(page: Page) -> str:
    """Renders a page about one thing."""
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
    # The hash by which the policy allows an inline style.
    style_hash = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode("ascii")
    return environment.get_template(template).render(style=style, style_hash=style_hash, **document)
