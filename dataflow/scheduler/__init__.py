"""The pure state machine that says what runs next: events go in, instructions come out.

Nothing here touches a socket, a clock, a thread or a tensor.
"""
