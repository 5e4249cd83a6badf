"""The fault campaign (`python -m tests.faults`): each module breaks runs in one way and reports what happened."""
