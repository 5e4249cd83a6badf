"""A tag record as tools of others write it."""

KINDLE = {
    "tags": ["oc:kindle", "oc", "kirin", "artist:lulubell", "oc only", "solo", "safe"],
    "score": 55,
    "path": "images/287/2877648.png",
    "aspect_ratio": 1.0,
    "anything": {"else": None},
}
"""The example of the original's description."""
