"""A step's time on a calibrated machine, and the backtest of such predictions."""
