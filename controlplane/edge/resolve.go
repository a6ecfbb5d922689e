package edge

import (
	"net"
	"net/http"
	"strconv"
	"strings"

	"torpor/api/e2b"
	"torpor/api/id"
)

// target is what a request is for.
type target struct {
	kind      kind
	sandboxID string
	port      uint16
	token     string        // kind byToken
	signature e2b.Signature // kind bySignature
}

type kind int

const (
	isREST      kind = iota
	bySandbox        // sandboxID and port are known
	byToken          // whose token it is has to be found
	bySignature      // whose token signed it has to be found
	isMalformed      // names a sandbox, but not properly
)

// resolve decides what r is for. It looks at nothing but the request: header pair, host name, token, signature, in this
// order (e2b-wire F.1). complaint is the text for isMalformed.
func resolve(r *http.Request, domain string) (t target, complaint string) {
	sandboxID, port := r.Header.Get("E2b-Sandbox-Id"), r.Header.Get("E2b-Sandbox-Port")
	if sandboxID != "" || port != "" {
		return named(sandboxID, port)
	}
	if sandboxID, port, ok := splitHost(r.Host, domain); ok {
		return named(sandboxID, port)
	}
	if r.Header.Get("X-Api-Key") != "" {
		return target{}, ""
	}
	if token := r.Header.Get("X-Access-Token"); token != "" {
		return target{kind: byToken, port: e2b.EnvdPort, token: token}, ""
	}
	if s, ok := e2b.SignatureOf(r); ok {
		return target{kind: bySignature, port: e2b.EnvdPort, signature: s}, ""
	}
	return target{}, ""
}

func named(sandboxID, port string) (target, string) {
	if !id.ValidSandbox(sandboxID) {
		return target{kind: isMalformed}, "Invalid sandbox ID"
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return target{kind: isMalformed}, "Invalid sandbox port"
	}
	return target{kind: bySandbox, sandboxID: sandboxID, port: uint16(n)}, ""
}

// splitHost takes "<port>-<id>[-…]" from a host name below domain or localhost. ok is false for names that are not of this
// form: a label that does not start with digits and "-" belongs to REST.
func splitHost(host, domain string) (sandboxID, port string, ok bool) {
	label, ok := labelBelow(hostname(host), "localhost")
	if !ok && domain != "" {
		label, ok = labelBelow(hostname(host), hostname(domain))
	}
	if !ok {
		return "", "", false
	}
	port, rest, dashed := strings.Cut(label, "-")
	if !dashed || port == "" || strings.Trim(port, "0123456789") != "" {
		return "", "", false
	}
	sandboxID, _, _ = strings.Cut(rest, "-") // further parts are a historic client id
	return sandboxID, port, true
}

// labelBelow returns the one label in front of ".domain".
func labelBelow(host, domain string) (label string, ok bool) {
	label, ok = strings.CutSuffix(host, "."+domain)
	return label, ok && label != "" && !strings.Contains(label, ".")
}

// hostname drops the port and the trailing dot, and lowers the case: host names know none.
func hostname(host string) string {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}
