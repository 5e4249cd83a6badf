"""The parts of `scripts/fault_campaign.py`: each breaks runs in one way and says what came of it."""
