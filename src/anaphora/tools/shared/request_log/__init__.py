"""Reads logs of requests: JSONL of several APIs, records, OpenTelemetry spans, vLLM's own log."""
