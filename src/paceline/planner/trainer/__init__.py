"""Memory model of Paceline's own trainer under a layout."""
