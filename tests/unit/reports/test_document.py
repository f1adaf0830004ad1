from paceline.reports.document import AnsweredPart, Block, Report, Section, render_report
from paceline.reports.tables.table import Table


def test_cells_headers_and_notes_of_a_table_appear_as_text() -> None:
    table = Table(headers=("<b>h",), rows=(("[x](y) <i>",),), caption="*c*", notes=("`n`",))
    part = AnsweredPart(title="t", question="q", blocks=(Block(tables=(table,)),), commands=())
    section = Section(name="n", title="s", parts=(part,))
    text = render_report(Report(title="r", summary=(), sections=(section,)))
    for shown in ("## 1. s\n", "&lt;b&gt;h", r"\[x\](y) &lt;i&gt;", r"\*c\*", r"\`n\`"):
        assert shown in text
