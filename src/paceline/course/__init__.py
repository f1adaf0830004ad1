"""The courses' answers, on top of everything: nothing below knows a course."""
