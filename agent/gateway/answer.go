package gateway

import (
	"encoding/json"
	"html"
	"net/http"
	"strconv"
	"strings"

	"torpor/api/apierr"
	"torpor/api/e2b"
)

// answerNotFound is one answer for a sandbox that is unknown, killed, or asleep and not to be woken by this request.
func answerNotFound(w http.ResponseWriter, r *http.Request, sandboxID string) {
	answer(w, r, http.StatusBadGateway, "The sandbox was not found",
		e2b.ProxyError{SandboxID: sandboxID, Message: "The sandbox was not found", Code: http.StatusBadGateway})
}

// answerPortClosed says that the sandbox runs and nothing listens on the port.
func answerPortClosed(w http.ResponseWriter, r *http.Request, sandboxID string, port uint16) {
	const message = "The sandbox is running but port is not open"
	answer(w, r, http.StatusBadGateway, message,
		e2b.ProxyError{SandboxID: sandboxID, Message: message, Port: port, Code: http.StatusBadGateway})
}

// answerCut says that the sandbox went away after the request was given to it and before any answer came.
func answerCut(w http.ResponseWriter, r *http.Request, sandboxID string) {
	const message = "The sandbox stopped serving before it answered; the request may have been carried out"
	answer(w, r, http.StatusBadGateway, message,
		e2b.ProxyError{SandboxID: sandboxID, Message: message, Code: http.StatusBadGateway})
}

// answerInternalRoute hides envd's platform routes.
func answerInternalRoute(w http.ResponseWriter, r *http.Request) {
	answer(w, r, http.StatusNotFound, "not found", struct {
		Message string `json:"message"`
		Path    string `json:"path"`
		Code    int    `json:"code"`
	}{"not found", r.URL.Path, http.StatusNotFound})
}

// answerError is the /v1 error body, with Retry-After where the table asks for it.
func answerError(w http.ResponseWriter, r *http.Request, e *apierr.Error) {
	if s := e.RetrySeconds(); s > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(s))
	}
	body := e.Body()
	answer(w, r, body.Code, body.Message, body)
}

// answer writes body as JSON for programs, or message as a small page for people.
func answer(w http.ResponseWriter, r *http.Request, status int, message string, body any) {
	header := w.Header()
	header.Set("Access-Control-Allow-Origin", "*") // so that a browser's script may read why
	header.Set("Cache-Control", "no-store")
	if !wantsJSON(r) {
		header.Set("Content-Type", "text/html; charset=utf-8")
		w.WriteHeader(status)
		text := html.EscapeString(message)
		_, _ = w.Write([]byte("<!doctype html><meta charset=utf-8><title>" + strconv.Itoa(status) + "</title><h1>" +
			strconv.Itoa(status) + "</h1><p>" + text + "</p>\n"))
		return
	}
	raw, err := json.Marshal(body)
	if err != nil { // impossible for the bodies above
		http.Error(w, message, http.StatusInternalServerError)
		return
	}
	header.Set("Content-Type", "application/json; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write(raw)
}

// wantsJSON follows the decision order of e2b-wire F.2.
func wantsJSON(r *http.Request) bool {
	accept := r.Header.Get("Accept")
	if strings.Contains(accept, "application/json") && !strings.Contains(accept, "text/html") {
		return true
	}
	mode := r.Header.Get("Sec-Fetch-Mode")
	switch mode {
	case "cors", "no-cors", "same-origin", "websocket":
		return true
	}
	if mode != "navigate" && r.Header.Get("X-Requested-With") != "" {
		return true
	}
	agent := strings.ToLower(r.UserAgent())
	for _, browser := range []string{"mozilla", "chrome", "safari", "firefox", "edge", "opera", "msie"} {
		if strings.Contains(agent, browser) {
			return false
		}
	}
	return true
}
