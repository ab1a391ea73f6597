"""What guest systems read; renderers return text and touch nothing."""
