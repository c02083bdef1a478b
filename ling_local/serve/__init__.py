"""`ling serve`: the OpenAI protocol on a local port, one answer at a time."""
