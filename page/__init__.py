"""What a page is: its key, its layout, its bytes and the events about it."""
