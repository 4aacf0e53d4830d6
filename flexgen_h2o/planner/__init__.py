"""What a policy needs and costs, before anything is allocated. Never imports torch."""
