"""Entry points for new users: a list of goals, and a demo."""
