package base

import (
	"slices"
	"testing"
)

func TestParseTargets(t *testing.T) {
	text := `Packages|Debian|bookworm|bookworm|main|http://mirror.test/debian/
DEP-11|Debian|bookworm|bookworm|main|http://mirror.test/debian/
Packages|Debian|bookworm|bookworm|non-free|http://mirror.test/debian/
Packages|Debian|bookworm-updates|bookworm-updates|main|http://mirror.test/debian/
Packages|Debian|bookworm-security|bookworm-security|main|http://mirror.test/security/
Packages|Debian|bookworm-security|bookworm-security|main|http://mirror.test/security/
Packages|Debian Backports|bookworm-backports|bookworm-backports|main|http://mirror.test/debian/
Packages|Debian|trixie|trixie|main|http://mirror.test/debian/
Packages|Somebody|bookworm|bookworm|main|http://other.test/
nonsense
`
	want := []string{
		"deb http://mirror.test/debian/ bookworm main",
		"deb http://mirror.test/debian/ bookworm-updates main",
		"deb http://mirror.test/security/ bookworm-security main",
	}
	if got := parseTargets(text); !slices.Equal(got, want) {
		t.Errorf("got %q\nwant %q", got, want)
	}
}

func TestParseAcquire(t *testing.T) {
	dump := `Acquire "";
Acquire::cdrom::mount "/media/cdrom/";
Acquire::http "";
Acquire::http::Proxy "http://proxy.test:3128";
Acquire::HTTPS::Verify-Peer "true";
Acquire::Check-Date "false";
Acquire::httpx::Nothing "1";
`
	want := []string{`Acquire::http::Proxy "http://proxy.test:3128"`, `Acquire::HTTPS::Verify-Peer "true"`, `Acquire::Check-Date "false"`}
	if got := parseAcquire(dump); !slices.Equal(got, want) {
		t.Errorf("got %q\nwant %q", got, want)
	}
}
