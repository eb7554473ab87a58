"""Reading Hugging Face folders into device arrays."""
