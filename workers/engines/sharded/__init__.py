"""What engines share whose models are divided over the processes of a rank.

Nothing here knows which engine divides them.
"""
