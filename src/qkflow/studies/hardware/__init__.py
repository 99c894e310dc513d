"""What training and studies take on given hardware: memory, time and cost, before anything is allocated."""
