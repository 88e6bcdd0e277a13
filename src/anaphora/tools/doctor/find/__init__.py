"""In: a ``Log``. Out: ``Finding``s (where prompts stop being the same, what changes there, and the possible repairs)
and the ``Rewriter``s that apply these repairs to prompts."""
