"""vLLM as its operator sees it: started, asked, and given new weights."""
