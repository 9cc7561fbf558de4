"""What a run takes before it is run (`mfubench predict`): time by terms, memory, both calibrated on measured runs."""
