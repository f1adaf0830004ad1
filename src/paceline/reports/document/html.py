"""A report as one HTML file that loads nothing, runs nothing and escapes everything.

Everything is inside: pictures as data, the style by its hash. The policy in the page's head forbids
the browser the rest, so that a name in a record could not do anything even if it got past escaping.
"""

import base64
import hashlib
from importlib import resources

from paceline.reports.document.model import Report


def render_html(report: Report) -> str:
    """Renders the page."""
    import jinja2

    files = resources.files("paceline.reports.document")
    style = files.joinpath("report.css").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode("ascii")
    template = environment.from_string(
        files.joinpath("report.html.jinja").read_text(encoding="utf-8")
    )
    # The hash by which the policy allows an inline style.
    style_hash = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode("ascii")
    return template.render(report=report, style=style, style_hash=style_hash)
