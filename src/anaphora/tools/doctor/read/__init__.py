"""In: a log file (its formats are read by ``tools.shared.request_log``), a tokenizer and a chat template.
Out: a ``Log``, whose prompts are rendered, tokenised, and mapped back to the request bodies."""
