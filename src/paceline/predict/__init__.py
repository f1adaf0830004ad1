"""Predicted step time and memory of any layout on a calibrated machine, and their backtests."""
