"""Builds the courses' report from a store, and prints the commands of missing measurements.

python examples/build_report.py paceline-records.jsonl
"""

import sys

from paceline.course.report import build_report
from paceline.records import RecordStore
from paceline.reports.document import render_html

report = build_report(list(RecordStore(sys.argv[1]).read()))
for section in report.sections:
    for part in section.parts:
        if not part.blocks:
            print(f"{section.title}, {part.title}: {part.commands[0]}")
print(f"{len(render_html(report)) / 1e6:.1f} MB of HTML")
