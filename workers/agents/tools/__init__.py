"""What a model may call in a conversation, and how a call is read out of what it says."""
