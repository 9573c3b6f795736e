"""What a timeline says: where time goes, what the critical path is, what changed; and the page that shows it."""

from megakernel.report.page import write_html

__all__ = ["write_html"]
