"""Pictures of what fails: goodput against devices, and runs under chaos."""
