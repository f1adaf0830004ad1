"""How anything is measured: timers, memory, devices, isolation, ranks."""
