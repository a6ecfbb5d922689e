package dataplane

import (
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"torpor/guest/env"
	"torpor/guest/files"
)

// maxInit bounds the body of POST /init, in bytes.
const maxInit = 4 << 20

// initRequest is the body of POST /init. The host configures a guest by handshake; this route is for who drives an envd
// by hand, so it knows just what a handshake can say.
type initRequest struct {
	EnvVars        map[string]string `json:"envVars"`
	AccessToken    string            `json:"accessToken"`
	Timestamp      *time.Time        `json:"timestamp"`
	DefaultUser    string            `json:"defaultUser"`
	DefaultWorkdir string            `json:"defaultWorkdir"`
	LifecycleID    string            `json:"lifecycleID"` // a correlation id; it changes nothing

	HyperloopIP  string            `json:"hyperloopIP"`
	VolumeMounts []json.RawMessage `json:"volumeMounts"`
	CABundle     string            `json:"caBundle"`
}

// init configures the sandbox. Once there is a token, the body must hold the same one.
func (p *plane) init(w http.ResponseWriter, r *http.Request) {
	var req initRequest
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxInit)).Decode(&req)
	if err != nil && !errors.Is(err, io.EOF) { // no body changes nothing
		(&files.Error{Code: http.StatusBadRequest, Message: "malformed body: " + err.Error()}).Write(w)
		return
	}
	var told *files.Error
	switch err := p.configure(&req); {
	case errors.As(err, &told):
		told.Write(w)
	case err != nil:
		p.log.Error().Err(err).Msg("configuring the sandbox")
		(&files.Error{Code: http.StatusInternalServerError, Message: err.Error()}).Write(w)
	default:
		w.WriteHeader(http.StatusNoContent)
	}
}

func (p *plane) configure(req *initRequest) error {
	return p.store.Update(func(id *env.Identity) error {
		if id.AccessToken != "" && subtle.ConstantTimeCompare([]byte(id.AccessToken), []byte(req.AccessToken)) != 1 {
			return &files.Error{Code: http.StatusUnauthorized, Message: unauthorized}
		}
		if name := unsupported(req); name != "" {
			return &files.Error{Code: http.StatusBadRequest, Message: fmt.Sprintf("%s is not supported", name)}
		}
		if req.Timestamp != nil {
			if p.clock == nil {
				return &files.Error{Code: http.StatusBadRequest, Message: "timestamp is not supported here: the clock is not ours to set"}
			}
			if err := p.clock(*req.Timestamp); err != nil {
				return err
			}
		}
		if req.EnvVars != nil {
			id.EnvVars = req.EnvVars
		}
		set(&id.AccessToken, req.AccessToken)
		set(&id.DefaultUser, req.DefaultUser)
		set(&id.DefaultWorkdir, req.DefaultWorkdir)
		return nil
	})
}

func set(field *string, value string) {
	if value != "" {
		*field = value
	}
}

// unsupported names the first option that was asked for and that this daemon does not have.
func unsupported(req *initRequest) string {
	switch {
	case req.HyperloopIP != "":
		return "hyperloopIP"
	case len(req.VolumeMounts) > 0:
		return "volumeMounts"
	case req.CABundle != "":
		return "caBundle"
	}
	return ""
}
