"""In: a ``Diagnosis``. Out: JSON values, text for the terminal, an HTML page, and the log rewritten with the repairs
(``--fix``)."""
