def continued(rendering, prompt_ids, completion_ids, messages, tools):
    """Return the prompt that continues a call, or None."""
    extension = rendering.extension(prompt_ids, completion_ids, messages, tools)
    return None if extension is None else prompt_ids + completion_ids + extension
