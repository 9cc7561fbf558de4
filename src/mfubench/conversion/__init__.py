"""Trained models, to and from the form that other libraries read: Hugging Face folders of safetensors."""
