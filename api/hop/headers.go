package hop

import (
	"net/http"
	"strings"
)

// The headers by which the public edge tells a host's gateway the target of a request. They are Torpor's own, exist on this
// one hop only, and are removed wherever a client or a guest sends them.
const (
	SandboxHeader = "Torpor-Sandbox"
	PortHeader    = "Torpor-Port"
)

// Strip removes every Torpor-* header.
func Strip(header http.Header) {
	for name := range header {
		if strings.HasPrefix(http.CanonicalHeaderKey(name), "Torpor-") {
			delete(header, name)
		}
	}
}
